"""Configuration of the reference model and of the engine around it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupKind, GroupSpec

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def first_visible(window_tokens: int | None, position: int) -> int:
    """First position that the token at ``position`` attends to; a window includes the token itself."""
    return 0 if window_tokens is None else max(0, position - window_tokens + 1)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose KV shares the blocks of one table, and their window in tokens (None: full attention)."""

    layers: tuple[int, ...]
    window_tokens: int | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a Llama-style decoder.

    The defaults are chosen so that damage shows. Of 96 cached tokens in bfloat16, one inverted byte changes the next 32
    greedy tokens in about 8 of 10 cases if it holds sign and exponent (else in 5 of 10), eight bytes in a row in 19 of
    20, and 64 in a row, as a damaged line or sector leaves them, nearly always.

    layers, heads, kv_heads, head_dim, hidden, intermediate, vocab: the usual sizes. ``heads`` query heads share
        ``kv_heads`` key and value heads evenly.
    seed: of the weights.
    dtype: "float32" or "bfloat16", of weights and KV.
    windows: how many tokens back a layer attends to, itself included; None: all. A pattern that repeats over the
        layers: ``(64, 64, None)`` is two sliding windows and one full attention, again and again. Empty: all full.

    Raises:
        ValueError: a size is below 1, the heads do not divide, or the dtype is unknown.
    """

    layers: int = 4
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 48
    intermediate: int = 256
    vocab: int = 2048
    seed: int = 0
    dtype: str = "bfloat16"
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads", "head_dim", "hidden", "intermediate", "vocab"):
            _at_least(name, getattr(self, name), 1)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary embedding turns pairs, so use an even number")
        if self.dtype not in _ITEM_BYTES:
            raise ValueError(f"dtype = {self.dtype!r} is unknown; use one of {', '.join(sorted(_ITEM_BYTES))}")
        for window in self.windows:
            if window is not None:
                _at_least("a window in windows", window, 1)

    @property
    def name(self) -> str:
        """Name that contains every setting that determines the KV bytes."""
        windows = "-a" + ".".join(str(window or "full") for window in self.windows) if self.windows else ""
        return (
            f"tierkv-reference-l{self.layers}-h{self.heads}-kv{self.kv_heads}-d{self.head_dim}-w{self.hidden}"
            f"-m{self.intermediate}-v{self.vocab}-s{self.seed}{windows}"
        )

    def layer_groups(self, num_groups: int) -> tuple[LayerGroup, ...]:
        """Split the layers into groups of equal size, each of one window, in the order in which windows appear.

        Raises:
            ValueError: the layers of a window do not split into such groups.
        """
        if self.layers % num_groups:
            raise ValueError(f"layers = {self.layers} do not split evenly into num_groups = {num_groups}")
        size = self.layers // num_groups
        pattern = self.windows or (None,)
        by_window: dict[int | None, list[int]] = {}
        for layer in range(self.layers):
            by_window.setdefault(pattern[layer % len(pattern)], []).append(layer)
        for window, layers in by_window.items():
            if len(layers) % size:
                raise ValueError(
                    f"num_groups = {num_groups} means {size} layers a group, which do not divide the {len(layers)} "
                    f"layers with window {window}; a group has one window, so use more groups or other windows"
                )
        return tuple(
            LayerGroup(tuple(layers[i : i + size]), window)
            for window, layers in by_window.items()
            for i in range(0, len(layers), size)
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the engine around the model.

    num_blocks: GPU blocks of the pool, the null block included.
    block_tokens: tokens per block, and per hash block.
    num_groups: KV groups; the layers are split evenly, those of different windows into different groups. All groups
        draw from one pool: pages are of one size, and a block belongs to one group at a time.
    tensor_parallel: ranks among which the heads are split; each has a KV pool of its own.
    max_batched_tokens: tokens computed in one step.
    max_running: requests that hold blocks at once (running, or waiting for a load).
    prefix_caching: keep the blocks of finished requests for reuse.
    worker_processes: the connector's workers are other processes; see ``Engine`` for how they reach the pool.
    hash_salt: seeds the chain of block hashes; another salt shares nothing.
    device: torch device of weights and KV pool.

    Raises:
        ValueError: a size is below its minimum, or layers or heads do not split evenly.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    num_blocks: int = 128
    block_tokens: int = 16
    num_groups: int = 1
    tensor_parallel: int = 1
    max_batched_tokens: int = 256
    max_running: int = 8
    prefix_caching: bool = True
    worker_processes: bool = False
    hash_salt: str = ""
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("block_tokens", "num_groups", "tensor_parallel", "max_batched_tokens", "max_running"):
            _at_least(name, getattr(self, name), 1)
        _at_least("num_blocks", self.num_blocks, self.num_groups + 1)
        self.model.layer_groups(self.num_groups)
        if self.model.kv_heads % self.tensor_parallel:
            raise ValueError(
                f"kv_heads = {self.model.kv_heads} do not split evenly among tensor_parallel = {self.tensor_parallel}"
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per group, the window of its layers."""
        return tuple(group.window_tokens for group in self.model.layer_groups(self.num_groups))

    def engine_spec(self) -> EngineSpec:
        """Description of this engine for tierkv."""
        kv_heads = self.model.kv_heads // self.tensor_parallel
        page = 2 * self.block_tokens * kv_heads * self.model.head_dim * _ITEM_BYTES[self.model.dtype]
        pages = (page,) * (self.model.layers // self.num_groups)
        return EngineSpec(
            model=self.model.name,
            dtype=self.model.dtype,
            groups=tuple(_group_spec(self.block_tokens, pages, window) for window in self.windows),
            hash_block_tokens=self.block_tokens,
            num_workers=self.tensor_parallel,
            capabilities=EngineCapabilities(prefix_caching=self.prefix_caching, worker_processes=self.worker_processes),
        )


def _group_spec(block_tokens: int, pages: tuple[int, ...], window: int | None) -> GroupSpec:
    kind = GroupKind.FULL_ATTENTION if window is None else GroupKind.SLIDING_WINDOW
    return GroupSpec(block_tokens, pages, kind, window)


def _at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} = {value} is too small; use {minimum} or more")
