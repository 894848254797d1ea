"""Sources of credentials. Reads the environment and looks for files; sends no request."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_AWS_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_GOOGLE_ENVIRONMENT = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY")
_GOOGLE_FILE = "~/.config/gcloud/application_default_credentials.json"
_AZURE_ENVIRONMENT = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_CLIENT_ID",
    "AZURE_FEDERATED_TOKEN_FILE",
)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Whether credentials were found, and where the chain was searched."""

    found: bool
    detail: str


def find_credentials(protocol: str) -> Credentials | None:
    """Search the usual chain of ``s3``, ``gs`` or ``az``. None for protocols with a chain of their own."""
    if protocol == "s3":
        return _find_aws()
    if protocol == "gs":
        return _find("Google", _GOOGLE_ENVIRONMENT, (_GOOGLE_FILE,))
    if protocol == "az":
        return _find("Azure", _AZURE_ENVIRONMENT, ())
    return None


def aws_from_files() -> Path | None:
    """File in ~/.aws that is used; None if the environment is used, or if there is no file."""
    if any(os.environ.get(name) for name in _AWS_ENVIRONMENT) and not os.environ.get("AWS_PROFILE"):
        return None
    return next((path for path in _aws_files() if path.is_file()), None)


def instance_metadata_allowed() -> bool:
    """Whether the role of the machine may be requested (AWS_EC2_METADATA_DISABLED)."""
    return os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true"


def _aws_files() -> tuple[Path, Path]:
    shared = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    return Path(shared).expanduser(), Path(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")).expanduser()


def _find_aws() -> Credentials:
    path = aws_from_files()
    if path is not None:
        return Credentials(found=True, detail=f"profile {os.environ.get('AWS_PROFILE', 'default')!r} of {path}")
    for name in _AWS_ENVIRONMENT:
        if os.environ.get(name):
            return Credentials(found=True, detail=f"{name} in the environment")
    tried = f"none in the environment ({', '.join(_AWS_ENVIRONMENT)}) or in {_aws_files()[0]}"
    if instance_metadata_allowed():
        return Credentials(found=True, detail=f"{tried}; the role of this machine will be requested")
    return Credentials(found=False, detail=f"{tried}; AWS_EC2_METADATA_DISABLED forbids the role of this machine")


def _find(whose: str, names: tuple[str, ...], files: tuple[str, ...]) -> Credentials:
    for name in names:
        if os.environ.get(name):
            return Credentials(found=True, detail=f"{name} in the environment")
    for file in files:
        if Path(file).expanduser().is_file():
            return Credentials(found=True, detail=file)
    tried = ", ".join((*names, *files))
    return Credentials(found=True, detail=f"none of {tried}; {whose}'s library will ask the machine's identity")
