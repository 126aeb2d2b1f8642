"""`nvcli profile-memory`: where the memory of each rank goes, and what to change."""
