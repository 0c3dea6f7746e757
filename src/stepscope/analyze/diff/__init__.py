"""What changed between two traces: how much longer a step takes, what makes up the change, and what is new or gone."""
