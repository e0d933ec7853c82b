-- Where the best program of a search comes from (rlvr discover): it and the attempts that led to it, or to $attempt, the oldest first; none for the start.
-- :attempt = null
-- plot: none

WITH RECURSIVE tried AS (
    SELECT
        run_id,
        candidate.number AS number,
        step AS round,
        CASE WHEN candidate.points_sha256 IS NOT NULL THEN reward END AS score,
        coalesce(failure_kind, grade_error) AS failure_kind,
        candidate.parents AS parents,
        candidate.error AS error,
        candidate.program_sha256 AS program_sha256
    FROM rollouts
    WHERE candidate IS NOT NULL
), ends AS (
    SELECT
        run_id,
        coalesce(
            $attempt::BIGINT,
            arg_min(number, (-score, number)) FILTER (score >= coalesce(competing_start(metadata), score))
        ) AS number
    FROM tried JOIN runs USING (run_id)
    GROUP BY run_id
), chain AS (
    SELECT run_id, number FROM ends WHERE number IS NOT NULL
    UNION
    SELECT tried.run_id, unnest(tried.parents) FROM chain JOIN tried USING (run_id, number)
)
SELECT run_id, number AS attempt, round, score, parents, failure_kind, error, program_sha256
FROM tried JOIN chain USING (run_id, number)
ORDER BY run_id, number;
