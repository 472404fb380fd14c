"""Programs that write the test checkpoints with the real libraries, one forked process a rank."""
