"""The host arena, and what every lower tier gets for nothing: frames, codecs, checked results, retries."""
