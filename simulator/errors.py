"""The one tree of errors; the command line maps each branch to an exit code."""

from __future__ import annotations

from typing import ClassVar


class MeshwrightError(Exception):
    """Base of every error a user may see; its message gives the value, the rule and the remedy.

    ``exit_code`` is that of the command line.

    Examples
    --------
    >>> import meshwright as mw
    >>> try:
    ...     mw.profile("dgx-h1000")
    ... except mw.MeshwrightError as error:
    ...     print(error.exit_code, "did you mean dgx-h100" in str(error))
    2 True
    """

    exit_code: ClassVar[int] = 1
    max_length: ClassVar[int] = 4000

    def __str__(self) -> str:
        """The message; of a long one its start and its end, where the remedy stands."""
        return self.cut(super().__str__())

    @classmethod
    def cut(cls, text: str) -> str:
        """The start and the end of a text that is longer than messages are."""
        if len(text) <= cls.max_length:
            return text
        end = cls.max_length // 4
        start = cls.max_length - end - 100
        return f"{text[:start]} … ({len(text) - start - end} characters left out) … {text[-end:]}"


class InputError(MeshwrightError):
    """The user's input is wrong: a name, a file, an option or a combination of them.

    Examples
    --------
    >>> import meshwright as mw
    >>> try:
    ...     mw.plan("zoo:gpt3", hardware="dgx-a100", devices=8)
    ... except mw.InputError as error:
    ...     print(error.exit_code, "there are mlp, resnet50" in str(error))
    2 True
    """

    exit_code: ClassVar[int] = 2


class UnsupportedError(InputError):
    """The request is well formed but not supported yet."""


class ProfileError(InputError):
    """A hardware profile is missing, malformed or too small for the request."""


class NetworkError(InputError):
    """A network is unknown, malformed or cannot be captured."""


class StrategyError(InputError):
    """A strategy file is malformed, of another version or of another network."""


class ProgramError(InputError):
    """A program cannot run to its end: a deadlock or a reference to nothing."""


class InfeasibleError(MeshwrightError):
    """No plan satisfies the limits; the message names the limit and what would make it fit.

    Examples
    --------
    >>> import meshwright as mw
    >>> try:
    ...     mw.plan("zoo:gpt2", hardware="dgx-a100", devices=1, global_batch=512, micro_batch=512, recompute="none")
    ... except mw.InfeasibleError as error:
    ...     print(error.exit_code, "it would fit without the pin" in str(error))
    3 True
    """

    exit_code: ClassVar[int] = 3


class ExecutionError(MeshwrightError):
    """A run on hardware failed or its losses differ from the reference.

    Examples
    --------
    >>> import meshwright as mw
    >>> result = mw.plan("zoo:mlp", hardware="cpu-2", devices=2)  # doctest: +SKIP
    >>> try:  # doctest: +SKIP
    ...     result.execute(steps=5, verify=True)
    ... except mw.ExecutionError as error:
    ...     print(error.exit_code, error)
    """

    exit_code: ClassVar[int] = 4


class ContextError(InputError, ValueError):
    """A key of a configuration is unknown, its value is wrong, or it contradicts another key."""


class IgnoredKeyWarning(UserWarning):
    """A key is set that the parallel mode does not read."""
