"""The published contract, on a directory, on an S3 server through both implementations, and in memory."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from fsspec_support import S3Server

import tierkv_fsspec
from tierkv.abc import BackendContext
from tierkv.testing import BackendConformance
from tierkv.types.keys import Key
from tierkv_fsspec import FsspecOptions
from tierkv_fsspec.backend import object_name

OBJECT_NAME_CHARS = 32


class ObjectFiles:
    """Objects as files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, key: Key) -> bytes:
        return (self.root / object_name(key)).read_bytes()

    def write(self, key: Key, data: bytes) -> None:
        (self.root / object_name(key)).write_bytes(data)

    def remove(self, key: Key) -> None:
        (self.root / object_name(key)).unlink()

    def count(self) -> int:
        return len([path for path in self.root.glob("??/*") if len(path.name) == OBJECT_NAME_CHARS])


class BucketObjects:
    """Objects through another client than the backend's."""

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self.client, self.bucket, self.prefix = client, bucket, prefix

    def read(self, key: Key) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=self.name(key))["Body"].read()

    def write(self, key: Key, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self.name(key), Body=data)

    def remove(self, key: Key) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=self.name(key))

    def count(self) -> int:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix)
        names = [entry["Key"].rpartition("/")[2] for page in pages for entry in page.get("Contents", [])]
        return len([name for name in names if len(name) == OBJECT_NAME_CHARS])

    def name(self, key: Key) -> str:
        return f"{self.prefix}/{object_name(key)}"


class TestDirectory(BackendConformance):
    plugin = tierkv_fsspec.PLUGIN
    raw_live = True

    def make_options(self, place: Path) -> FsspecOptions:
        return FsspecOptions(url=f"file://{place}")

    def raw(self, place: Path, context: BackendContext) -> ObjectFiles:
        return ObjectFiles(place / context.namespace.fingerprint().hex())


@pytest.fixture(scope="class")
def bucket_of_class(request: pytest.FixtureRequest, s3: S3Server) -> None:
    """A bucket for all tests of a class: the kit makes options without fixtures."""
    request.cls.server, request.cls.bucket = s3, s3.new_bucket()


@pytest.mark.usefixtures("bucket_of_class")
class S3Conformance(BackendConformance):
    """Every place is a prefix in one bucket."""

    plugin = tierkv_fsspec.PLUGIN
    local_place = False
    raw_live = True
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

    def raw(self, place: Path, context: BackendContext) -> BucketObjects:
        prefix = f"{self.prefix(place)}/{context.namespace.fingerprint().hex()}"
        return BucketObjects(self.server.client, self.bucket, prefix)

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
    model_examples = 1
    model_steps = 10


class TestMemory(BackendConformance):
    """For trials: the same, but for outliving the process."""

    capabilities_of_memory = dataclasses.replace(tierkv_fsspec.PLUGIN.capabilities, durable=False)
    plugin = dataclasses.replace(tierkv_fsspec.PLUGIN, capabilities=capabilities_of_memory)
    local_place = False
    raw_access = "the bytes are in this process's memory, and nowhere else"

    def make_options(self, place: Path) -> FsspecOptions:
        return FsspecOptions(url=f"memory:/{place}")
