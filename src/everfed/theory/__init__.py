"""What the papers' theorems say in numbers."""
