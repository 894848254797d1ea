"""Places: which backend a path belongs to, and what a stack file names."""

from __future__ import annotations

from pathlib import Path

import pytest
from filled_stores import disk_tier, fill, model_namespace, object_tier, place_at, stack_file

from tierkv.abc import StoredNamespace
from tierkv.errors import ConfigError, TierKVError
from tierkv.plugins.loading import load_plugins
from tierkv.stores.places import find_places, folder_place, only_place
from tierkv.stores.selection import NamespaceFilter, stored_namespaces


@pytest.mark.parametrize("backend", ["disk", "lmdb", "fsspec"])
def test_a_path_is_recognised_by_what_is_there(tmp_path: Path, backend: str) -> None:
    """An operator forgets which backend wrote a directory: its files say so."""
    fill(place_at(tmp_path / "kv", backend), model_namespace(), range(2))
    (place,) = find_places(str(tmp_path / "kv"), load_plugins())
    assert place.backend.name == backend
    assert [found.namespace for found in place.list_namespaces() if isinstance(found, StoredNamespace)] == [
        model_namespace()
    ]


def test_an_export_folder_is_recognised(tmp_path: Path) -> None:
    """An import names the folder, and nothing else."""
    fill(folder_place(str(tmp_path / "kv")), model_namespace(), range(2))
    (place,) = find_places(str(tmp_path / "kv"), load_plugins())
    assert place.backend.name == "folder"


def test_a_directory_of_other_files_is_refused_with_the_reasons(tmp_path: Path) -> None:
    """A path that is the user's documents by mistake: nothing may be made of it, and nothing changed."""
    (tmp_path / "thesis.txt").write_text("the only copy")
    with pytest.raises(ConfigError, match="no place that an installed backend can use"):
        find_places(str(tmp_path), load_plugins())
    with pytest.raises(ConfigError, match="no such file or directory"):
        find_places(str(tmp_path / "absent"), load_plugins())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_path_is_that_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell's paths are relative to its folder, and a backend may want an absolute one. A new place says that."""
    monkeypatch.chdir(tmp_path)
    for backend in ("disk", "lmdb", "fsspec"):
        (place,) = find_places("kv", load_plugins(), backend=backend)
        assert str(tmp_path / "kv") in {getattr(place.options, "path", ""), getattr(place.options, "url", "")}
    for backend in ("disk", "lmdb"):
        (place,) = find_places("kv", load_plugins(), backend=backend)
        with pytest.raises(TierKVError, match="nothing was stored there yet"):
            list(place.list_namespaces())


@pytest.mark.parametrize(
    ("backend", "left"),
    [("disk", ".tierkv-disk.tierkv-disk.json.26930-140476323508800.tmp"), ("lmdb", f"tierkv-lmdb.json.{'0' * 32}")],
)
def test_a_directory_that_a_killed_command_left_empty(tmp_path: Path, backend: str, left: str) -> None:
    """`tierkv copy` was ended at its first file: listing the place said that it is no directory of the tier."""
    (place,) = find_places(str(tmp_path), load_plugins(), backend=backend)
    for _ in range(2):
        with pytest.raises(TierKVError, match="is empty: nothing was stored there yet"):
            list(place.list_namespaces())
        (tmp_path / left).touch()
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(TierKVError, match="is not the directory of a"):
        list(place.list_namespaces())


def test_a_stack_file_names_its_lower_tiers(tmp_path: Path) -> None:
    """The file that an engine starts from is what an operator has at hand."""
    stack = stack_file(tmp_path, disk_tier(tmp_path / "disk"), object_tier(tmp_path / "objects"))
    places = find_places(str(stack), load_plugins())
    assert [place.name for place in places] == ["disk", "objects"]
    assert [place.capacity_bytes for place in places] == [64 << 20, None]
    assert [place.name for place in find_places(str(stack), load_plugins(), tier="objects")] == ["objects"]
    with pytest.raises(ConfigError, match=r"--tier lmdb: .* has disk, objects"):
        find_places(str(stack), load_plugins(), tier="lmdb")
    with pytest.raises(ConfigError, match=r"several tiers \(disk, objects\).*--to-tier"):
        only_place(str(stack), places, "--to-tier")


def test_a_stack_without_lower_tiers_has_nothing_at_rest(tmp_path: Path) -> None:
    """The host tier ends with its engine; an empty table would look like an empty store."""
    stack = stack_file(tmp_path)
    with pytest.raises(ConfigError, match="no lower tier"):
        find_places(str(stack), load_plugins())


def test_a_backend_that_cannot_list_namespaces_says_how_to_name_them(tmp_path: Path) -> None:
    """A third-party backend without the ability is used all the same, with a description from elsewhere."""
    place = place_at(tmp_path / "sqlite", "example")
    fill(place, model_namespace(), range(3))
    ((_, error),) = stored_namespaces([place], NamespaceFilter())
    assert isinstance(error, TierKVError)
    assert "--namespace-file" in str(error)
    ((_, found),) = stored_namespaces([place], NamespaceFilter(), [model_namespace()])
    assert found == StoredNamespace(model_namespace())


def test_a_damaged_description_is_an_error_in_its_place(tmp_path: Path) -> None:
    """One damaged manifest must not hide the other namespaces."""
    place = place_at(tmp_path / "kv", "disk")
    fill(place, model_namespace("good"), range(1))
    fill(place, model_namespace("bad"), range(1))
    (tmp_path / "kv" / model_namespace("bad").fingerprint().hex() / "namespace.json").write_text("{")
    found = list(place.list_namespaces())
    assert [each.namespace.model for each in found if isinstance(each, StoredNamespace)] == ["good"]
    assert any("namespace.json" in str(each) for each in found if isinstance(each, TierKVError))
