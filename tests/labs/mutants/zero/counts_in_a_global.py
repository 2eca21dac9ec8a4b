"""aimed at: step1: parameters. The number of the step is kept beside state, and lost with the process."""

_steps = [0]
_right = step1


def step1(params, grads, state, comm, reduce_scatter, all_gather):
    _steps[0] += 1
    if state:
        state["step"] = _steps[0] - 1
    _right(params, grads, state, comm, reduce_scatter, all_gather)
