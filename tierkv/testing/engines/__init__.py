"""Small engines that drive a stack."""
