"""A node among nodes: its lease and key, its suspicions, the placement of its tasks, and how it leaves or dies."""
