"""The errors a user can cause, each with the exit code the command line promises. Their text is one line: the thing,
what was expected, what was found, what to do."""


class UserError(Exception):
    """A bad argument, prompt or message."""

    exit_code = 2


class KernelError(UserError):
    """A kernel that could not be launched, or that the GPU stopped."""

    exit_code = 1


class CheckpointError(UserError):
    """Anything wrong with the checkpoint folder."""

    exit_code = 3


class DoesNotFit(UserError):
    """The plan needs more memory than there is."""

    exit_code = 4
