"""SFTP server on the loopback interface: ``sftp.py ROOT ALLOWED_KEYS``. Prints its port; ends with its input."""

from __future__ import annotations

import asyncio
import sys

import asyncssh


async def serve(root: str, allowed: str) -> None:
    """Serve a directory until the standard input ends."""
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        authorized_client_keys=allowed,
        sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=root),
    )
    sys.stdout.write(f"{server.get_port()}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
