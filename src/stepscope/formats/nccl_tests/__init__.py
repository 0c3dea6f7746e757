"""Output of nccl-tests and rccl-tests, as text or JSON, read and made into runs. No torch."""
