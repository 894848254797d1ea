"""Memory of the host tier: one arena, private or shared between processes."""
