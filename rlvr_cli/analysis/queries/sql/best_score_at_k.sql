-- Mean best score of k attempts of a search (rlvr discover), drawn from all that it made; an attempt that is not valid scores 0.
-- :k = null
-- plot: x=k y=best_score_at_k log=x y_label="score"

-- Without k: 1, 2, 4, ... and all. Of n attempts, the i-th best (from 0) is the best of k drawn ones with probability
-- C(n - 1 - i, k - 1) / C(n, k). Attempts of best-of-n are alike, so this is what k of them find; those of other strategies build on
-- another, and the query attempts says what the first k found.
WITH scores AS (
    SELECT
        run_id,
        list(score ORDER BY score DESC) AS scores,
        count(*) AS n,
        count(*) FILTER (valid) AS valid
    FROM (
        SELECT
            run_id,
            candidate.points_sha256 IS NOT NULL AS valid,
            CASE WHEN candidate.points_sha256 IS NOT NULL THEN reward ELSE 0 END AS score
        FROM rollouts
        WHERE candidate IS NOT NULL
    )
    GROUP BY run_id
), ks AS (
    SELECT *, unnest(
        CASE WHEN $k IS NULL
        THEN list_append([2 ** i FOR i IN range(0, 20) IF 2 ** i < n], n)
        ELSE list_distinct(string_split(trim($k::VARCHAR, '[]'), ',')::BIGINT[]) END
    )::BIGINT AS k
    FROM scores
)
SELECT
    run_id,
    k,
    n AS attempts,
    valid,
    CASE WHEN k <= n THEN least(scores[1], round(list_sum([
        scores[i + 1] * exp(lgamma(n - i) - lgamma(k) - lgamma(n - i - k + 1) - lgamma(n + 1) + lgamma(k + 1) + lgamma(n - k + 1))
        FOR i IN range(0, n - k + 1)
    ]), 6)) END AS best_score_at_k
FROM ks
ORDER BY run_id, k;
