-- Best score against attempts of a search (rlvr discover): each one's score, the best so far with that of the start, tokens and seconds.
-- plot: x=attempt y=best_score+score points=score title="Scores of the attempts" y_label="score"

WITH tried AS (
    SELECT
        run_id,
        candidate.number AS number,
        step AS round,
        candidate.points_sha256 IS NOT NULL AS valid,
        reward,
        coalesce(failure_kind, grade_error) AS failure_kind,
        num_prompt_tokens + num_response_tokens AS tokens,
        candidate.same_as AS same_as,
        candidate.seconds AS seconds
    FROM rollouts
    WHERE candidate IS NOT NULL
)
SELECT
    run_id,
    number AS attempt,
    round,
    CASE WHEN valid THEN reward END AS score,
    greatest(max(CASE WHEN valid THEN reward END) OVER before, competing_start(metadata)) AS best_score,
    failure_kind,
    same_as,
    (sum(tokens) OVER before)::BIGINT AS tokens,
    seconds
FROM tried JOIN runs USING (run_id)
WINDOW before AS (PARTITION BY run_id ORDER BY number)
ORDER BY run_id, number;
