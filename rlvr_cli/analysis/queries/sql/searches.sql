-- A row for each search (rlvr discover): attempts, how many are valid, first and best score beside that of the start, tokens and seconds.
-- plot: none

WITH tried AS (
    SELECT
        run_id,
        candidate.number AS number,
        CASE WHEN candidate.points_sha256 IS NOT NULL THEN reward END AS score,
        num_prompt_tokens + num_response_tokens AS tokens,
        candidate.seconds AS seconds
    FROM rollouts
    WHERE candidate IS NOT NULL
)
SELECT
    run_id,
    count(number) AS attempts,
    count(score) AS valid,
    count(score) / nullif(count(number), 0) AS valid_share,
    any_value(metadata ->> '$.start.score')::DOUBLE AS start_score,
    arg_min(score, number) AS first_score,
    greatest(max(score), any_value(competing_start(metadata))) AS best_score,
    -- NULL: it is the program to start from
    arg_min(number, (-score, number)) FILTER (score >= coalesce(competing_start(metadata), score)) AS best_attempt,
    coalesce(sum(tokens), 0)::BIGINT AS tokens,
    sum(seconds) AS program_seconds
FROM runs LEFT JOIN tried USING (run_id)
WHERE command = 'discover'
GROUP BY run_id
ORDER BY run_id;
