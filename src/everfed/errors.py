"""The one error a user sees: what is wrong and what to do, in one sentence."""


class EverfedError(Exception):
    """A mistake in the input or the surroundings of a run, never a bug of everfed."""

    exit_code = 1
