"""forge against other attention implementations, interleaved in one process."""
