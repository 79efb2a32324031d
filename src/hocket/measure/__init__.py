"""What a run did: events, bytes, time and where it went, the verdict."""
