"""What starts ranks and carries their messages. `hocket.engines.catalogue` has them all."""
