"""The compiled module built from `native/`."""

import numpy as np
import numpy.typing as npt

RECORD_SIZE: int
INSTRUCTION_SET: str

def sample(
    logits: npt.NDArray[np.float32],
    records: npt.NDArray[np.uint8],
    stop_ids: npt.NDArray[np.int32] | None = None,
    bias_ids: npt.NDArray[np.int32] | None = None,
    bias_values: npt.NDArray[np.float32] | None = None,
    history: npt.NDArray[np.int32] | None = None,
    extra: npt.NDArray[np.int32] | None = None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Sample one token per row; return tokens [rows] and logprobs [rows].

    `logits` is [rows, vocab] with any row stride; it is not modified. `records` is
    [rows, RECORD_SIZE], the bytes of `sampling.RECORD`; the flat arrays are those its ragged
    fields index, `history` is [slots, length]. Releases the GIL. A row that cannot be sampled
    (see `sampling_torch`) gets token -1 and logprob NaN. Raises `ValueError` for shapes that do
    not fit together and `TypeError` for other dtypes.
    """
