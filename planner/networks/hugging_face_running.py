"""How a model of transformers runs while a step is captured.

Features stand among the tokens, numbers that are known are worked out, images are packed, recurrences are one operator.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from planner.graph.cleaning import constant_call
from planner.graph.recurrence import recurrence_operator
from simulator.errors import InputError, NetworkError, UnsupportedError

_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"


@contextmanager
def running(model: nn.Module, batch: int = 0) -> Iterator[None]:
    """While this is open, a model of transformers runs in a form that captures, with a `batch` of samples."""
    before = os.environ.get(_CHECKS)
    os.environ[_CHECKS] = "1"  # transformers compares the number of features with that of their tokens
    try:
        with _Running(batch), _replaced(model):
            yield
    finally:
        if before is None:
            del os.environ[_CHECKS]
        else:
            os.environ[_CHECKS] = before


class _Running(TorchFunctionMode):
    """Functions of torch that are called otherwise than a model calls them.

    *Features first*: models write the features of an image over the tokens that stand for it, wherever these are
    (``masked_scatter``, or an index of booleans), after counting them. A captured step has fixed shapes, so that
    features come first in each sample, those of one kind behind another's; what a step costs is the same.

    *Known numbers*: while a step is captured, what follows from real tensors alone is worked out, so that code may read
    numbers from them; a real tensor that meets those of the step is written out in the graph.
    """

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self.taken = 0
        self.captures = detect_fake_mode() is not None
        self.counted: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or what stands for it."""
        kwargs = kwargs or {}
        if not self.captures or func in _ATTRIBUTES:
            found = self._of_features(func, args)
            return func(*args, **kwargs) if found is None else found
        if func in _FINITE:
            return _apart(torch.tensor, _FINITE[func])
        held = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        counted = [id(leaf) in self.counted for leaf in held]
        real = [_is_known(leaf) for leaf in held]
        known = all(map(operator.or_, counted, real)) and (bool(held) or func is torch.arange)
        if any(real) and known:
            return _apart(func, *self._numbers(args), **self._numbers(dict(kwargs)))
        if any(real):
            found = self._by_known(func, args)
            if found is not None:
                return found
            args, kwargs = tree_map(partial(_written, batch=self.batch), (tuple(args), dict(kwargs)))
        found = self._of_features(func, args)
        if found is not None:
            return found
        if args and func is Tensor.__setitem__:
            self.counted.pop(id(args[0]), None)  # what is known of it has changed
        made = func(*args, **kwargs)
        if known and isinstance(made, Tensor) and made.dtype in _WHOLE and made.numel() <= MOST_COUNTED:
            self.counted[id(made)] = made, _apart(func, *self._numbers(args), **self._numbers(dict(kwargs)))
        return made

    def _numbers(self, values: Any) -> Any:
        """Arguments with real tensors in place of those whose numbers are known beside."""
        return tree_map(lambda x: self.counted[id(x)][1] if id(x) in self.counted else x, values)

    def _of_features(self, func: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Features put first, in place of a function that looks for their tokens; None for any other function."""
        if func is Tensor.masked_scatter and len(args) == 3 and args[0].dim() == 3:
            return self._placed(args[0], args[2])
        if func not in (Tensor.__getitem__, Tensor.__setitem__):
            return None
        mask = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            return None
        if func is Tensor.__getitem__ and mask.dim() == 1 and args[0].dim() >= _IMAGES:
            return args[0]  # no image is left out
        if mask.dim() < 2:
            return None
        if func is Tensor.__getitem__ and mask.shape == args[0].shape and args[1] is mask:
            return args[0].flatten()  # all numbers of a sample count
        if mask.shape != args[0].shape[:2] or args[0].dim() != 3:
            return None
        if func is Tensor.__getitem__:
            return args[0][:, : self.taken].flatten(0, 1) if self.taken else None
        if not isinstance(args[2], Tensor) or args[2].dim() == 0:
            return None
        rows, rest = divmod(args[2].numel(), args[0].shape[0] * args[0].shape[2])
        if rest or rows > args[0].shape[1]:
            return None
        self.taken = self.taken or rows
        places = args[0][:, :rows]
        places.copy_(args[2].reshape(places.shape))
        return False  # nothing: the assignment has been made

    def _by_known(self, func: Callable[..., Any], args: Sequence[Any]) -> Tensor | None:
        """Rows that a known index takes out of each sample or packed image; None for any other function."""
        if func is not Tensor.__getitem__ or _is_known(args[0]):
            return None
        index, *others = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not isinstance(index, Tensor) or any(other not in (slice(None), ...) for other in others):
            return None
        x: Tensor = args[0]
        dims, count = index.dim(), index.shape[0] if index.dim() else 0
        if index.dtype == torch.bool:
            if _apart(lambda: bool(index.all())):
                return x.flatten(0, dims - 1) if dims > 1 else x
            if dims == 2 and _apart(lambda: bool((index == index[:1]).all())):
                return x.index_select(1, _written(_apart(lambda: index[0].nonzero()[:, 0]))).flatten(0, 1)
            return None
        if dims != 1 or x.shape[0] <= count or x.shape[0] % count:
            return None
        if not _apart(lambda: torch.equal(index.sort()[0], torch.arange(count))):
            return None
        return x.view(-1, count, *x.shape[1:]).index_select(1, _written(index)).flatten(0, 1)

    def _placed(self, embedded: Tensor, features: Tensor) -> Tensor | None:
        batch, length, width = embedded.shape
        if features.numel() % (batch * width):
            return None
        rows = features.reshape(batch, -1, width).to(embedded.dtype)
        first, behind = self.taken, self.taken + rows.shape[1]
        if behind > length:
            raise InputError(
                f"the images and sounds of a sample take {behind} of its tokens, more than the sequence length "
                f"{length}; use --seq-len {behind + 1} or more"
            )
        self.taken = behind
        return torch.cat([embedded[:, :first], rows, embedded[:, behind:]], dim=1)


_FINITE = {
    function: answer
    for name, answer in (("isfinite", True), ("isnan", False), ("isinf", False))
    for function in (getattr(torch, name), getattr(Tensor, name))
}
"""Functions that look for numbers that are none, which a captured step has not."""
MOST_COUNTED = 1 << 18
"""Numbers of a tensor that are worked out beside the graph where they follow from counting."""
_WHOLE = (torch.int64, torch.int32, torch.bool)
_IMAGES = 4
"""Dims of a batch of images."""
_ATTRIBUTES = {Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__}  # type: ignore[attr-defined]


def _is_known(value: object) -> bool:
    return type(value) is Tensor and not torch._is_functional_tensor(value)


def _written(value: Any, batch: int = 0) -> Any:
    """A real tensor as the operators of a graph that make it: samples of a batch that are alike are made once."""
    if not isinstance(value, Tensor) or not _is_known(value):
        return value
    if batch < _SEVERAL or value.dim() == 0 or value.shape[0] % batch or not value.numel():
        return _literal(value)
    samples = _apart(lambda: value.view(batch, -1, *value.shape[1:]))
    if not _apart(lambda: bool((samples == samples[:1]).all())):
        raise NetworkError(
            "a tensor has numbers that differ between the samples of a batch, which a graph for any batch cannot hold; "
            "write the network with its loss as py:MODULE:FACTORY, with numbers that follow from one sample"
        )
    return _literal(_apart(lambda x: x[0].clone(), samples)).expand(samples.shape).flatten(0, 1)


def _literal(value: Tensor) -> Tensor:
    with _disable_current_modes():
        make, arguments, keywords = constant_call(value)
    made: Tensor = make(*arguments, **keywords)
    return made


_SEVERAL = 2


def known_tensors(numbers: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Tensors of known numbers, which are real while a step is captured."""
    return _there(lambda: {name: torch.tensor(value) for name, value in numbers.items()}, device)


def _there(make: Callable[[], dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    made: dict[str, Tensor] = _apart(make)
    return made if detect_fake_mode() is not None else {name: value.to(device) for name, value in made.items()}


def rows_of_ones(lengths: Mapping[str, int], batch: int, device: torch.device) -> dict[str, Tensor]:
    """Masks ``(batch, length)`` that hide nothing, whose numbers are known."""
    made: dict[str, Tensor] = _apart(
        lambda: {name: torch.ones(batch, n, dtype=torch.int64) for name, n in lengths.items()}
    )
    return made if detect_fake_mode() is not None else {name: value.to(device) for name, value in made.items()}


def _apart(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function makes of known numbers, beside a step that is being captured."""
    if detect_fake_mode() is None:
        return function(*args, **kwargs)
    with _disable_current_modes(), torch.device("cpu"):
        return function(*args, **kwargs)


def _for_one_image(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the grid of packed images, worked out for one of them and repeated for all.

    The images of a batch are equally large, so that they are told to the model as the frames of one clip.
    """

    def found(grid: Any = None, *args: Any, **kwargs: Any) -> Any:
        name = next((name for name in ("grid_thw", "target_sizes") if name in kwargs), "")
        grid = kwargs.pop(name) if name else grid
        one, images = grid.clone(), int(grid[0, 0])
        one[0, 0] = 1
        made = _apart(function, one, *args, **kwargs)
        several = made if isinstance(made, tuple) else (made,)
        repeated = tuple(
            part if not isinstance(part, Tensor) else _written(part).repeat(images, *[1] * (part.dim() - 1))
            for part in several
        )
        return repeated if isinstance(made, tuple) else repeated[0]

    return found


def _windows(function: Callable[..., Any]) -> Callable[..., Any]:
    """The windows of packed images: their rows in one image, and where they end in all."""

    def found(grid: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if detect_fake_mode() is None:
            return function(grid, *args, **kwargs)  # type: ignore[no-any-return]  # `_by_known` is for captures

        def ends() -> tuple[Tensor, Tensor]:
            one, images = grid.clone(), int(grid[0, 0])
            one[0, 0] = 1
            index, places = function(one, *args, **kwargs)
            lengths = places.diff().repeat(images)
            if len(set(lengths.tolist())) > 1:
                raise UnsupportedError(
                    "windows of an image that are not equally large are not supported; use an image_size that is a "
                    "multiple of window_size"
                )
            return index, F.pad(lengths.cumsum(0), (1, 0))

        made: tuple[Tensor, Tensor] = _apart(ends)
        return made

    return found


def _packed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for a function of transformers' models that makes something of the grid of packed images."""
    if name in ("get_vision_cu_seqlens", "get_vision_attention_seqlens"):
        return function
    return _windows(function) if name == "get_vision_window_index" else _for_one_image(function)


def _ours(place: Any) -> dict[str, Callable[..., Any]]:
    """By the names that a module of transformers knows them by, functions that stand for its own."""
    found = {name: function for name, function in _RECURRENCES.items() if hasattr(place, name)}
    packed = [name for name in vars(place) if name.startswith("get_vision_")]
    found |= {name: _packed(name, getattr(place, name)) for name in packed}
    if packed and hasattr(place, "is_flash_attention_requested"):
        found["is_flash_attention_requested"] = lambda *_, **__: True  # which takes all images at once
    return found


def rows_of_packed(ends: object) -> int:
    """Rows of each packed image, or window of it, of which the model was told where they end; 0 where nothing is."""
    if not isinstance(ends, Tensor):
        return 0
    return int(_apart(lambda: ends[1] - ends[0]))


_POSITIONS = "compute_3d_position_ids"


@contextmanager
def _replaced(model: nn.Module) -> Iterator[None]:
    """While this is open, the model's code calls our functions in place of transformers' own."""
    places = {type(part).__module__: sys.modules[type(part).__module__] for part in model.modules()}
    found = [(place, name, ours) for place in places.values() for name, ours in _ours(place).items()]
    before = [getattr(place, name) for place, name, _ in found]
    placed = [part for part in model.modules() if hasattr(part, _POSITIONS)]
    for place, name, ours in found:
        setattr(place, name, ours)
    for part in placed:  # tokens of images are counted as those of text, which costs the same
        object.__setattr__(part, _POSITIONS, lambda *_, **__: None)
    try:
        yield
    finally:
        for part in placed:
            object.__delattr__(part, _POSITIONS)
        for (place, name, _), function in zip(found, before, strict=True):
            setattr(place, name, function)


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Outputs of a gated delta rule, tensors ``(batch, length, heads, width)``; training asks for no last state."""
    if use_qk_l2norm_in_kernel:
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    tensors = (query * query.shape[-1] ** -0.5, key, value, g, beta.to(g.dtype))
    outputs = recurrence_operator()(*(x.transpose(1, 2) for x in tensors), chunk_size)
    return outputs.transpose(1, 2), None


def _scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,  # noqa: N803 they are given by name
    dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:  # fmt: skip
    """Outputs of a state-space scan, tensors ``(batch, length, heads, width)``, steps ``(batch, length, heads)``."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    if dt_limit[0] > 0 or isfinite(dt_limit[1]) or not dt_softplus:
        dt = dt.clamp(*dt_limit)
    taken = (C, B, hidden_states * dt.unsqueeze(-1), A * dt)
    outputs: Tensor = recurrence_operator()(*(x.transpose(1, 2) for x in taken), None, chunk_size).transpose(1, 2)
    return outputs if D is None else outputs + D.unsqueeze(-1) * hidden_states


_RECURRENCES: dict[str, Callable[..., Any]] = {"torch_chunk_gated_delta_rule": _delta_rule, "mamba2_chunk_scan": _scan}
"""By the names that transformers' models call them by."""
