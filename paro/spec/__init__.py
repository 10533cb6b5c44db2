"""Description of each unit's shards and collectives: executed by the engine, counted by plans."""
