"""The workshop: keeps, applies, builds, tests and exports the patch series."""
