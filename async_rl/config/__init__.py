"""Settings: schema, loading, cross-checks and explanation."""
