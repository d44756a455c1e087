"""Tests on GPUs: ``make test-gpu``. ``pytest tests/gpu --device cpu`` runs the same tests on CPUs, to check them."""
