"""The published contract, on a directory, on an S3 server through both implementations, and in memory."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from fsspec_support import S3Server

import tierkv_fsspec
from tierkv.testing import BackendConformance
from tierkv.types.keys import Key
from tierkv_fsspec import FsspecOptions
from tierkv_fsspec.backend import object_name


class TestDirectory(BackendConformance):
    plugin = tierkv_fsspec.PLUGIN

    def make_options(self, place: Path) -> FsspecOptions:
        return FsspecOptions(url=f"file://{place}")

    def damage(self, place: Path, key: Key) -> None:
        (file,) = place.glob(f"*/{object_name(key)}")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)

    def raw_remove(self, place: Path, key: Key) -> None:
        (file,) = place.glob(f"*/{object_name(key)}")
        file.unlink()


@pytest.fixture(scope="class")
def bucket_of_class(request: pytest.FixtureRequest, s3: S3Server) -> None:
    """A bucket for all tests of a class: the kit makes options without fixtures."""
    request.cls.server, request.cls.bucket = s3, s3.new_bucket()


@pytest.mark.usefixtures("bucket_of_class")
class S3Conformance(BackendConformance):
    """Every place is a prefix in one bucket."""

    plugin = tierkv_fsspec.PLUGIN
    local_place = False
    many_frames = 100
    model_examples = 6
    model_steps = 15
    crash_rounds = 2
    implementation: ClassVar[Literal["obstore", "fsspec"]]
    server: ClassVar[S3Server]
    bucket: ClassVar[str]

    def make_options(self, place: Path) -> FsspecOptions:
        return FsspecOptions(
            url=f"s3://{self.bucket}/{self.prefix(place)}",
            endpoint_url=self.server.endpoint,
            implementation=self.implementation,
        )

    def damage(self, place: Path, key: Key) -> None:
        where = {"Bucket": self.bucket, "Key": self.find(place, key)}
        content = bytearray(self.server.client.get_object(**where)["Body"].read())
        content[len(content) // 2] ^= 0xFF
        self.server.client.put_object(**where, Body=bytes(content))

    def raw_remove(self, place: Path, key: Key) -> None:
        self.server.client.delete_object(Bucket=self.bucket, Key=self.find(place, key))

    def find(self, place: Path, key: Key) -> str:
        """Full name of a key's object."""
        listed = self.server.client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix(place))["Contents"]
        (name,) = (entry["Key"] for entry in listed if entry["Key"].endswith(object_name(key)))
        return name

    @staticmethod
    def prefix(place: Path) -> str:
        """The bucket's part of a place."""
        return hashlib.sha256(str(place).encode()).hexdigest()[:16]


class TestS3ThroughObstore(S3Conformance):
    implementation = "obstore"


class TestS3ThroughS3fs(S3Conformance):
    """Less of it: the store is the same, and s3fs takes its time."""

    implementation = "fsspec"
    many_frames = 30
    crash_rounds = 1
    test_random_histories_equal_a_dict = None  # type: ignore[assignment]  # pytest's way to leave out what is inherited
    test_readers_see_old_or_new_but_whole = None  # type: ignore[assignment]  # the same


class TestMemory(BackendConformance):
    """For trials: the same, but for outliving the process."""

    capabilities_of_memory = dataclasses.replace(tierkv_fsspec.PLUGIN.capabilities, durable=False)
    plugin = dataclasses.replace(tierkv_fsspec.PLUGIN, capabilities=capabilities_of_memory)
    local_place = False

    def make_options(self, place: Path) -> FsspecOptions:
        return FsspecOptions(url=f"memory:/{place}")
