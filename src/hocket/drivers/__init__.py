"""What drives a strategy: sessions, where gradients come from, Hocket's own loop, the user's, and servers."""
