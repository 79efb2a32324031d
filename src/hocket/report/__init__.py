"""Pictures and words of runs: one page that opens offline, figures as files, a live page, other tools' formats."""
