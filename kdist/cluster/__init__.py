"""One program on several processes: who is there, who serves whom, and what if one fails."""
