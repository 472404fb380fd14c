"""Broken, hostile, killed and racing: what users, trainers and disks do to checkpoints, by the thousand."""
