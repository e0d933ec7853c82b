"""Where a model starts: twice the unit vectors and their negatives."""

DIM = 11

points = [[sign * 2 * (i == j) for j in range(DIM)] for i in range(DIM) for sign in (1, -1)]
