"""One model, or one sample, split over ranks: what a rank holds, and what it says to the others in between."""
