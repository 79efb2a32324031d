"""The studies that come with Hocket, one TOML file each."""
