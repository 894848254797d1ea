"""The frame: header, checksum and payload of a chunk at rest."""
