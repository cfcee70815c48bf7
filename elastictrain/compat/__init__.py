"""The only rooms that touch private names of other libraries, one file per library."""
