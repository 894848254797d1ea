"""The shapes of model and engine: what they refuse, and what they tell tierkv."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tierkv.reference import Engine, EngineConfig, ModelConfig
from tierkv.types.engine import GroupKind

OTHER = {"heads": 8, "dtype": "float32", "seed": 7, "windows": (64,)}


@pytest.mark.parametrize("name", ["layers", "heads", "kv_heads", "head_dim", "hidden", "intermediate", "vocab"])
def test_a_model_size_below_one_is_refused(name: str) -> None:
    """Torch would fail much later, with a message about shapes."""
    with pytest.raises(ValueError, match=rf"{name} = 0 is too small; use 1 or more"):
        ModelConfig(**{name: 0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3, "kv_heads": 2}, "heads = 3 is not a multiple of kv_heads = 2"),
        ({"head_dim": 5}, "head_dim = 5 is odd"),
        ({"dtype": "float8"}, "dtype = 'float8' is unknown; use one of bfloat16, float32"),
    ],
)
def test_an_impossible_model_is_refused(change: dict[str, object], message: str) -> None:
    """The message must name the value and the fix."""
    with pytest.raises(ValueError, match=message):
        ModelConfig(**change)


@pytest.mark.parametrize(
    "name", ["block_tokens", "num_groups", "tensor_parallel", "max_batched_tokens", "max_running", "num_blocks"]
)
def test_an_engine_size_below_its_minimum_is_refused(name: str) -> None:
    """An engine with none of these would step forever and do nothing."""
    with pytest.raises(ValueError, match=rf"{name} = 0 is too small"):
        EngineConfig(**{name: 0})


def test_uneven_groups_are_refused() -> None:
    """Groups of different page sizes would be another cache layout than the one promised."""
    with pytest.raises(ValueError, match="layers = 4 do not split evenly into num_groups = 3"):
        EngineConfig(num_groups=3)


def test_uneven_ranks_are_refused() -> None:
    """A rank with half a head would hold KV that no other engine can read."""
    with pytest.raises(ValueError, match="kv_heads = 2 do not split evenly among tensor_parallel = 3"):
        EngineConfig(tensor_parallel=3)


def test_groups_have_one_window_each() -> None:
    """Layers that keep different blocks cannot share a table."""
    model = ModelConfig(layers=6, windows=(64, 64, None))
    groups = model.layer_groups(3)
    assert [(group.layers, group.window_tokens) for group in groups] == [((0, 1), 64), ((3, 4), 64), ((2, 5), None)]
    assert [(group.layers, group.window_tokens) for group in ModelConfig(layers=4).layer_groups(2)] == [
        ((0, 1), None),
        ((2, 3), None),
    ]
    with pytest.raises(ValueError, match="num_groups = 2 means 3 layers a group, which do not divide the 4 layers wi"):
        EngineConfig(model=model, num_groups=2)
    with pytest.raises(ValueError, match="a window in windows = 0 is too small"):
        ModelConfig(windows=(0,))


def test_the_spec_tells_windows() -> None:
    """By kind and window tierkv decides which chunks a hit needs."""
    spec = EngineConfig(model=ModelConfig(layers=3, windows=(None, 40, 9)), num_groups=3).engine_spec()
    full, window = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW
    assert [(group.kind, group.window_tokens) for group in spec.groups] == [(full, None), (window, 40), (window, 9)]


@pytest.mark.parametrize("name", [field.name for field in fields(ModelConfig)])
def test_the_spec_tells_models_apart(name: str) -> None:
    """Two models of one name would read each other's KV: whatever decides the bytes must be in the spec."""
    model = ModelConfig()
    value = OTHER.get(name, getattr(model, name) * 2 if isinstance(getattr(model, name), int) else None)
    spec = EngineConfig(model=model).engine_spec()
    other = EngineConfig(model=replace(model, **{name: value})).engine_spec()
    assert (spec.model, spec.dtype) != (other.model, other.dtype)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_page_bytes_are_those_of_the_tensors(dtype: str, ranks: int, num_groups: int) -> None:
    """Tierkv sizes its chunks by the spec and copies by the tensors: they must agree, for each rank."""
    config = EngineConfig(
        model=ModelConfig(dtype=dtype), num_blocks=5, num_groups=num_groups, block_tokens=8, tensor_parallel=ranks
    )
    engine = Engine(config)
    spec = engine.engine_spec()
    assert spec == config.engine_spec()
    assert spec.hash_block_tokens == 8
    assert spec.num_workers == ranks
    for rank in range(ranks):
        assert len(spec.groups) == len(engine.kv_caches(rank)) == num_groups
        for group, tensors in zip(spec.groups, engine.kv_caches(rank), strict=True):
            assert group.block_tokens == 8
            assert group.page_bytes == tuple(tensor[0].nbytes for tensor in tensors)
            assert all(tensor.is_contiguous() and len(tensor) == 5 for tensor in tensors)
