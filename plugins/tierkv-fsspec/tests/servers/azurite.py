"""Run a command while Azurite serves Azure's blobs on the loopback interface: ``azurite.py FOLDER COMMAND...``.

FOLDER is the directory of ``npm install azurite``. Blobs are kept in memory, and telemetry is off. The command gets the
server's address from TIERKV_TEST_OBJECT_URL, TIERKV_TEST_OBJECT_ENDPOINT and Azure's own variables.
"""

from __future__ import annotations

import base64
import os
import secrets
import sys
import tempfile
from pathlib import Path

from azure.storage.blob import BlobServiceClient
from running import free_port, listens, run, running

ACCOUNT = "tierkvtests"
CONTAINER = "tierkv-tests"


def main() -> int:
    """Start, run the command, stop."""
    program, command = Path(sys.argv[1]) / "node_modules/.bin/azurite-blob", sys.argv[2:]
    port, key = free_port(), base64.b64encode(secrets.token_bytes(64)).decode()
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    arguments = ["--silent", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
    address = ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with tempfile.TemporaryDirectory(prefix="tierkv-azurite-") as data:
        log, accounts = Path(data) / "azurite.log", {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"}
        with running([program, *arguments, *address], log, lambda: listens(port), accounts):
            os.environ["NO_PROXY"] = "127.0.0.1"
            BlobServiceClient(endpoint, credential=key).create_container(CONTAINER)
            protocol = "DefaultEndpointsProtocol=http"
            environment = {
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": key,
                "AZURE_STORAGE_CONNECTION_STRING": (
                    f"{protocol};AccountName={ACCOUNT};AccountKey={key};BlobEndpoint={endpoint};"
                ),
                "TIERKV_TEST_OBJECT_URL": f"az://{CONTAINER}",
                "TIERKV_TEST_OBJECT_ENDPOINT": endpoint,
            }
            return run(command, environment)


if __name__ == "__main__":
    sys.exit(main())
