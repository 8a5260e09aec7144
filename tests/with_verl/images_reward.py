"""A reward for runs on images, whatever they show: what depends on the response alone."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(len(solution_str) % 7)
