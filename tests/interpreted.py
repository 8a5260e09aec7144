"""Triton's interpreter, as vLLM's kernels need it."""

import importlib.util


def take_masks_of_any_type() -> None:
    """Have the interpreter, if Triton is here, store by masks of which it made integers: a bool and booleans."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime.interpreter import InterpreterBuilder

    store = InterpreterBuilder.create_masked_store
    if store.__module__ != __name__:

        def stored(builder: object, ptrs: object, value: object, mask: object, policy: object) -> object:
            mask.data = mask.data.astype(bool)
            return store(builder, ptrs, value, mask, policy)

        stored.__module__ = __name__
        InterpreterBuilder.create_masked_store = stored
