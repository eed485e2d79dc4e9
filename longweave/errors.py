"""The errors that users see. Each says what failed, the value that was seen and what to do."""


class LongweaveError(Exception):
    """Base of every error that longweave raises on purpose."""


class InputError(LongweaveError, ValueError):
    """An argument is wrong: its value, its shape, or how it fits another argument."""


class GroupError(LongweaveError, RuntimeError):
    """The process group does not fit: its size, its backend, or what its ranks hold differs."""


class BackendError(LongweaveError, RuntimeError):
    """A kernel that was asked for by name cannot serve this call."""
