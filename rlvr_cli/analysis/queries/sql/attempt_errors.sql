-- Why attempts of a search were not valid (rlvr discover): how many by kind, and an error of each, as the next prompt had it.
-- plot: none

-- Errors that differ only in their numbers count as one.
WITH failed AS (
    SELECT
        run_id,
        candidate.number AS number,
        coalesce(failure_kind, grade_error) AS failure_kind,
        coalesce(grade_error_detail, candidate.error) AS error,
        count(*) OVER (PARTITION BY run_id) AS attempts
    FROM rollouts
    WHERE candidate IS NOT NULL
    QUALIFY candidate.points_sha256 IS NULL
)
SELECT
    run_id,
    failure_kind,
    count(*) AS attempts,
    count(*) / any_value(attempts) AS share,
    min(number) AS first_attempt,
    max(number) AS last_attempt,
    arg_min(error, number) AS error
FROM failed
GROUP BY run_id, failure_kind, regexp_replace(error, '[0-9]+', '0', 'g')
ORDER BY run_id, attempts DESC, first_attempt;
