"""A node among nodes: its lease and key, whom it suspects, where its tasks are wished, and how it leaves or dies."""
