"""The audit as an OpenEnv server, for trainers elsewhere. The extra `openenv` installs what this folder imports."""
