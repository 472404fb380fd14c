"""Results for people (rich) and for programs (JSON). Only here rich is imported, and only results are seen."""
