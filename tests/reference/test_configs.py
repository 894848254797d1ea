"""The shapes of model and engine: what they refuse, and what they tell tierkv."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tierkv.reference import Engine, EngineConfig, ModelConfig

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


@pytest.mark.parametrize("name", ["block_tokens", "num_groups", "max_batched_tokens", "max_running", "num_blocks"])
def test_an_engine_size_below_its_minimum_is_refused(name: str) -> None:
    """An engine with none of these would step forever and do nothing."""
    with pytest.raises(ValueError, match=rf"{name} = 0 is too small"):
        EngineConfig(**{name: 0})


def test_uneven_groups_are_refused() -> None:
    """Groups of different page sizes would be another cache layout than the one promised."""
    with pytest.raises(ValueError, match="layers = 4 do not split evenly into num_groups = 3"):
        EngineConfig(num_groups=3)


@pytest.mark.parametrize("name", [field.name for field in fields(ModelConfig)])
def test_the_spec_tells_models_apart(name: str) -> None:
    """Two models of one name would read each other's KV: whatever decides the bytes must be in the spec."""
    model = ModelConfig()
    value = OTHER.get(name, getattr(model, name) * 2 if isinstance(getattr(model, name), int) else None)
    spec = EngineConfig(model=model).engine_spec()
    other = EngineConfig(model=replace(model, **{name: value})).engine_spec()
    assert (spec.model, spec.dtype) != (other.model, other.dtype)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_page_bytes_are_those_of_the_tensors(dtype: str, num_groups: int) -> None:
    """Tierkv sizes its chunks by the spec and copies by the tensors: they must agree."""
    config = EngineConfig(model=ModelConfig(dtype=dtype), num_blocks=5, num_groups=num_groups, block_tokens=8)
    engine = Engine(config)
    spec = engine.engine_spec()
    assert spec == config.engine_spec()
    assert spec.hash_block_tokens == 8
    assert len(spec.groups) == len(engine.kv_caches) == num_groups
    for group, tensors in zip(spec.groups, engine.kv_caches, strict=True):
        assert group.block_tokens == 8
        assert group.page_bytes == tuple(tensor[0].nbytes for tensor in tensors)
        assert all(tensor.is_contiguous() and len(tensor) == 5 for tensor in tensors)
