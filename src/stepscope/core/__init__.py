"""What every room uses and nothing else knows: errors, units, safe text, whole files."""
