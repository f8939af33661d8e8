//! The statements that run all the time, written out.
//!
//! Each compares the tokens in its own snapshot and says which shards are ours in it (`mine`). Tokens are 64 random
//! bits, never used twice, so the token alone names the shard.

/// $1 statement timeout, $2 lock timeout, in milliseconds.
///
/// The planner sees few rows in a queue whose heap keeps the size of its backlog, and then prefers to read all of it:
/// 1,274 pages instead of 2. Joins are between arrays of a settle alone, where a nested loop, should an estimate of ten rows ever suggest one,
/// would compare each with each. One plan for all values, because nothing about it depends on them.
pub const RELAY_SESSION: &str = "
select set_config('default_transaction_isolation', 'read committed', false),
       set_config('timezone', 'UTC', false),
       set_config('statement_timeout', $1, false),
       set_config('lock_timeout', $2, false),
       set_config('idle_in_transaction_session_timeout', $1, false),
       set_config('enable_seqscan', 'off', false),
       set_config('enable_bitmapscan', 'off', false),
       set_config('enable_nestloop', 'off', false),
       set_config('plan_cache_mode', 'force_generic_plan', false),
       set_config('jit', 'off', false)";

/// $1 tokens, $2 after (exclusive), $3 up to (inclusive), $4 limit. One row, also when nothing matches.
///
/// `xmax` of a snapshot lies one above the highest transaction that has *ended*: running ones may lie above it, so it
/// bounds nothing. The age of transaction 3 tells the next id to be given out, without taking one.
pub const HEADS: &str = "
with mine as materialized (
  select s.shard from outbox_shard s where s.token = any($1))
select array(select m.shard from mine m) as mine,
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint as xmin,
       pg_snapshot_xmax(pg_current_snapshot())::text::bigint as xmax,
       age('3'::xid)::bigint as next_from_3,
       coalesce(array_agg(q.id), '{}') as ids,
       coalesce(array_agg(q.key_hash), '{}') as lanes,
       coalesce(array_agg(q.bytes), '{}') as sizes,
       coalesce(array_agg(q.shard), '{}') as shards
from (select q.id, q.key_hash, q.bytes, q.shard
      from outbox_queue q
      where q.id > $2 and q.id <= $3 and q.shard = any(array(select m.shard from mine m))
      order by q.id
      limit $4) q";

/// As [`HEADS`], for one lane: $5 its hash.
pub const LANE: &str = "
with mine as materialized (
  select s.shard from outbox_shard s where s.token = any($1))
select array(select m.shard from mine m) as mine,
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint as xmin,
       pg_snapshot_xmax(pg_current_snapshot())::text::bigint as xmax,
       age('3'::xid)::bigint as next_from_3,
       coalesce(array_agg(q.id), '{}') as ids,
       coalesce(array_agg(q.key_hash), '{}') as lanes,
       coalesce(array_agg(q.bytes), '{}') as sizes,
       coalesce(array_agg(q.shard), '{}') as shards
from (select q.id, q.key_hash, q.bytes, q.shard
      from outbox_queue q
      where q.id > $2 and q.id <= $3 and q.key_hash = $5 and q.shard = any(array(select m.shard from mine m))
      order by q.id
      limit $4) q";

/// $1 tokens, $2 and $3 the cursor (microseconds, id), $4 limit. `statement_timestamp()` is the database's clock at the
/// start of this statement; unlike `clock_timestamp()` it can bound an index scan.
pub const DUE: &str = "
with mine as materialized (
  select s.shard from outbox_shard s where s.token = any($1))
select array(select m.shard from mine m) as mine,
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint as xmin,
       pg_snapshot_xmax(pg_current_snapshot())::text::bigint as xmax,
       age('3'::xid)::bigint as next_from_3,
       coalesce(array_agg(w.id), '{}') as ids,
       coalesce(array_agg(w.key_hash), '{}') as lanes,
       coalesce(array_agg(w.bytes), '{}') as sizes,
       coalesce(array_agg(w.shard), '{}') as shards,
       coalesce(array_agg(w.attempts), '{}') as attempts,
       coalesce(array_agg(w.tries), '{}') as tries,
       coalesce(array_agg((extract(epoch from w.due_at) * 1000000)::bigint), '{}') as due,
       (extract(epoch from statement_timestamp()) * 1000000)::bigint as now
from (select w.id, w.key_hash, w.bytes, w.shard, w.attempts, w.tries, w.due_at
      from outbox_waiting w
      where (w.due_at, w.id + 0) > (timestamptz 'epoch' + $2 * interval '1 microsecond', $3)
        and w.due_at <= statement_timestamp()
        and w.shard = any(array(select m.shard from mine m))
      order by w.due_at, w.id + 0
      limit $4) w";

/// $1 tokens, $2 ids. The first row carries `mine`, the others a message each.
pub const MESSAGES: &str = "
with mine as materialized (
  select s.shard from outbox_shard s where s.token = any($1))
select array(select m.shard from mine m) as mine, null::bigint, null::text, null::text, null::text, null::text,
       null::text, null::text, null::text, null::int, null::text, null::text, null::text, null::bytea, null::int,
       null::text, null::text, null::bigint
union all
select null, o.id, o.message_id, o.topic, o.tag, coalesce(o.message_key, o.aggregate_type || ':' || o.aggregate_id),
       o.aggregate_type, o.aggregate_id, o.event_type, o.schema_version, o.headers, o.content_type,
       o.payload, o.payload_bytes, o.max_attempts, o.trace, o.trace_state,
       (extract(epoch from o.created_at) * 1000000)::bigint
from outbox o
where o.id = any($2)";

/// Acknowledged. $1 tokens; $2 ids read from the queue; $3, $4, $5 ids read from waiting with their attempts and tries;
/// $6, $7, $8 all ids with sink and evidence; $9 relay.
///
/// The shard rows are locked in their order: an uncommitted takeover is waited for and then seen, and two statements
/// never wait for each other. The receipt is made from what the deletes returned.
pub const SENT: &str = "
with mine as materialized (
  select s.shard from outbox_shard s where s.token = any($1) order by s.shard for share of s),
from_queue as (
  delete from outbox_queue q
  where q.id = any($2) and q.shard = any(array(select m.shard from mine m))
  returning q.id),
from_waiting as (
  delete from outbox_waiting w
  where w.id = any($3)
    and w.attempts = ($4::int[])[array_position($3, w.id)] and w.tries = ($5::int[])[array_position($3, w.id)]
    and w.shard = any(array(select m.shard from mine m))
  returning w.id),
gone as materialized (select id from from_queue union all select id from from_waiting),
receipt as (
  insert into outbox_sent (bucket, sent_at, relay, n, sink, ids, evidence)
  select g.id >> 12, clock_timestamp(), $9, count(*), v.sink, array_agg(g.id order by g.id),
         case when count(v.evidence) > 0 then array_agg(v.evidence order by g.id) end
  from gone g join unnest($6::bigint[], $7::text[], $8::text[]) v (id, sink, evidence) on v.id = g.id
  group by g.id >> 12, v.sink)
select array(select m.shard from mine m) as mine, array(select g.id from gone g) as settled";

/// Failed, to be tried again. $1 to $5 as in [`SENT`]; $6 to $11 all ids with attempts, tries, backoff in microseconds,
/// hold on the key and error.
///
/// A waiting row is deleted and written anew like any other: it costs what the update of an indexed time costs, and
/// there is one way to write it.
pub const RETRY: &str = "
with mine as materialized (
  select s.shard from outbox_shard s where s.token = any($1) order by s.shard for share of s),
from_queue as (
  delete from outbox_queue q
  where q.id = any($2) and q.shard = any(array(select m.shard from mine m))
  returning q.id, q.key_hash, q.bytes, q.shard),
from_waiting as (
  delete from outbox_waiting w
  where w.id = any($3)
    and w.attempts = ($4::int[])[array_position($3, w.id)] and w.tries = ($5::int[])[array_position($3, w.id)]
    and w.shard = any(array(select m.shard from mine m))
  returning w.id, w.key_hash, w.bytes, w.shard),
gone as materialized (select * from from_queue union all select * from from_waiting),
waits as (
  insert into outbox_waiting (id, key_hash, due_at, bytes, shard, attempts, tries, holds_key, last_error)
  select g.id, g.key_hash, clock_timestamp() + v.backoff * interval '1 microsecond', g.bytes, g.shard,
         v.attempts, v.tries, v.holds_key, v.error
  from gone g
  join unnest($6::bigint[], $7::int[], $8::int[], $9::bigint[], $10::boolean[], $11::text[])
       v (id, attempts, tries, backoff, holds_key, error) on v.id = g.id)
select array(select m.shard from mine m) as mine, array(select g.id from gone g) as settled";

/// Given up. $1 to $5 as in [`SENT`]; $6 to $11 all ids with attempts, tries, reason, hold on the key and error.
pub const DEAD: &str = "
with mine as materialized (
  select s.shard from outbox_shard s where s.token = any($1) order by s.shard for share of s),
from_queue as (
  delete from outbox_queue q
  where q.id = any($2) and q.shard = any(array(select m.shard from mine m))
  returning q.id, q.key_hash, q.bytes, q.shard),
from_waiting as (
  delete from outbox_waiting w
  where w.id = any($3)
    and w.attempts = ($4::int[])[array_position($3, w.id)] and w.tries = ($5::int[])[array_position($3, w.id)]
    and w.shard = any(array(select m.shard from mine m))
  returning w.id, w.key_hash, w.bytes, w.shard),
gone as materialized (select * from from_queue union all select * from from_waiting),
dies as (
  insert into outbox_dead (id, key_hash, dead_at, bytes, shard, attempts, tries, holds_key, reason, last_error)
  select g.id, g.key_hash, clock_timestamp(), g.bytes, g.shard, v.attempts, v.tries, v.holds_key, v.reason, v.error
  from gone g
  join unnest($6::bigint[], $7::int[], $8::int[], $9::text[], $10::boolean[], $11::text[])
       v (id, attempts, tries, reason, holds_key, error) on v.id = g.id)
select array(select m.shard from mine m) as mine, array(select g.id from gone g) as settled";

/// Prolongs a lease that has not ended. $1 relay, $2 lease in microseconds, $3 state, $4 tokens.
///
/// `in_time` false: the row is missing or has expired, nothing was written; see `ownership.rs` for what follows.
/// While the row has not expired at the moment it is written, nobody can have taken a shard since the snapshot of this
/// statement, so the tokens seen in it are exact.
pub const RENEW: &str = "
with beat as (
  update outbox_relay r
  set heartbeat_at = clock_timestamp(), expires_at = clock_timestamp() + $2 * interval '1 microsecond', state = $3
  where r.relay = $1 and r.expires_at > clock_timestamp()
  returning 1)
select exists (select from beat) as in_time,
       array(select s.shard from outbox_shard s where s.token = any($4)) as mine,
       (select count(*) from outbox_relay r where r.expires_at > statement_timestamp()) as live";

/// The messages that hold their keys. $1 tokens; $2, $3 the shard and id to go on after; $4 the last shard; $5 limit.
pub const HELD: &str = "
with mine as materialized (
  select s.shard from outbox_shard s where s.token = any($1))
(select w.shard, w.id, w.key_hash, false as dead
 from outbox_waiting w
 where w.holds_key and (w.shard, w.id) > ($2, $3) and w.shard <= $4 and w.shard = any(array(select m.shard from mine m))
 order by w.shard, w.id
 limit $5)
union all
(select d.shard, d.id, d.key_hash, true
 from outbox_dead d
 where d.holds_key and (d.shard, d.id) > ($2, $3) and d.shard <= $4 and d.shard = any(array(select m.shard from mine m))
 order by d.shard, d.id
 limit $5)
order by 1, 2
limit $5";
