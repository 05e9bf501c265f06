"""The trainer: the only client of the four services, and the owner of the loop.

`ppo`, `sft` and `rm` each have a `main(config) -> int` that the command line calls. Around them:
`launch` starts the services that have no address, `checks` compares what they say of themselves,
`pipeline` turns prompts into experience, `learning` turns experience into optimizer steps, `ledger`
remembers what became of every sample, and `sinks` write the numbers down.

Nothing here imports torch: a trainer can run on a laptop beside services that run elsewhere.
"""
