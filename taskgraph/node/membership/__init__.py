"""A node among nodes: its lease and key, the nodes that it suspects, placement, and how it leaves or dies."""
