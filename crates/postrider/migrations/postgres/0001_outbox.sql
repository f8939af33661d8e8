-- Postrider, schema version 1, PostgreSQL 13 or newer.
--
-- A message is written once, into "outbox", and never touched again. What changes about it lives in small
-- tables: it is in exactly one of outbox_queue, outbox_waiting, outbox_dead, outbox_cancelled, or named in a
-- receipt of outbox_sent. The view outbox_status puts the two together; look at messages through it.
--
-- Everything is created in the schema that stands first in the search_path of the session.

-- The functions below remember this search_path: the installation's schema, then nothing a stranger can write to.
select set_config('search_path', format('%I, pg_temp', current_schema()), true);

create table outbox (
  -- The order within a key. Given by the database alone, one at a time: a sequence CACHE above 1 would hand out
  -- ids in another order than transactions use them.
  id              bigint generated always as identity primary key,
  -- Made by the business ("order:4711:paid"); the consumer recognises repeats by it.
  -- Ascending text or UUIDv7 is cheapest: a random key dirties another index page per insert.
  message_id      text collate "C" not null,
  topic           text not null,
  tag             text,
  message_key     text,                         -- what is kept in order; default aggregate_type:aggregate_id
  aggregate_type  text,
  aggregate_id    text,
  event_type      text,
  schema_version  int,
  headers         text,                         -- a JSON object of strings
  content_type    text,
  payload         text,                         -- JSON and text, readable
  payload_bytes   bytea,                        -- anything else; both null = no payload
  max_attempts    int,                          -- null = the relay's policy
  due_at          timestamptz,                  -- null = at once
  trace           text,                         -- W3C traceparent
  trace_state     text,                         -- W3C tracestate
  content_hash    bigint,                       -- written by the library to tell "same again" from "same id, other content"
  created_at      timestamptz not null default clock_timestamp(),
  constraint outbox_message_id_unique unique (message_id),
  constraint outbox_message_id_length check (octet_length(message_id) between 1 and 255),
  constraint outbox_topic_form check (octet_length(topic) between 1 and 255 and topic !~ '[[:space:][:cntrl:]]'),
  constraint outbox_message_key_length check (octet_length(message_key) between 1 and 255),
  constraint outbox_aggregate_pair check ((aggregate_type is null) = (aggregate_id is null)),
  constraint outbox_one_payload check (payload is null or payload_bytes is null),
  constraint outbox_payload_size check (octet_length(payload) <= 67108864 and octet_length(payload_bytes) <= 67108864),
  constraint outbox_headers_size check (octet_length(headers) <= 16384),
  constraint outbox_headers_form check (
    jsonb_typeof(headers::jsonb) = 'object' and not jsonb_path_exists(headers::jsonb, '$.* ? (@.type() != "string")')),
  constraint outbox_max_attempts_positive check (max_attempts > 0)
);

-- Ready: due and not settled. A row exists exactly that long. ("bytes" lets the relay bound a batch before it
-- touches a payload; the column order keeps the row at 48 bytes.)
create table outbox_queue (
  id        bigint primary key,
  key_hash  bigint not null,                    -- the lane
  bytes     int not null,
  shard     smallint not null                   -- key_hash & 63
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, vacuum_truncate = off);

-- Waiting: delayed, or failed and to be tried again. A row stays here until it is settled.
create table outbox_waiting (
  id          bigint primary key,
  key_hash    bigint not null,
  due_at      timestamptz not null,
  bytes       int not null,
  shard       smallint not null,
  attempts    int not null default 0,           -- tries that count against the budget
  tries       int not null default 0,           -- publishes that may have reached the sink
  holds_key   boolean not null default false,   -- a retry: the messages of its key wait for it
  last_error  text
);
-- (id + 0) orders like id but cannot be chosen to look an id up: for "id = any(...)" on a table believed small, the
-- planner took this index over the primary key and would have read all of it once per id.
create index outbox_waiting_due on outbox_waiting (due_at, (id + 0));
create index outbox_waiting_holds on outbox_waiting (shard, id) where holds_key;

-- Dead: given up, kept for a human.
create table outbox_dead (
  id          bigint primary key,
  key_hash    bigint not null,
  dead_at     timestamptz not null default clock_timestamp(),
  bytes       int not null,
  shard       smallint not null,
  attempts    int not null,
  tries       int not null,
  holds_key   boolean not null default false,   -- on_dead = block: the messages of its key wait for an operator
  reason      text not null,                    -- permanent | attempts | quarantined
  last_error  text
);
create index outbox_dead_at on outbox_dead (dead_at, id);
create index outbox_dead_holds on outbox_dead (shard, id) where holds_key;

-- Cancelled: an operator discarded it.
create table outbox_cancelled (
  id            bigint primary key,
  cancelled_at  timestamptz not null default clock_timestamp(),
  cancelled_by  text not null,
  reason        text
);

-- Receipts: what the sink has acknowledged. One row per settled batch and 4,096 ids, so that the receipt of one
-- message is found by its bucket however much history there is.
create table outbox_sent (
  bucket    bigint not null,                    -- id >> 12
  sent_at   timestamptz not null,
  relay     bigint not null,
  n         int not null,
  sink      text not null,
  ids       bigint[] not null,
  evidence  text[]                              -- what the sink answered, parallel to ids; null where it gives nothing
);
create index outbox_sent_bucket on outbox_sent (bucket);
create index outbox_sent_at on outbox_sent (sent_at) include (n);

-- One row per relay process. Expiry is judged by this database's clock alone.
create table outbox_relay (
  relay         bigint primary key,             -- random, drawn at every process start
  instance      text not null,                  -- the name people see
  version       text not null,
  started_at    timestamptz not null default clock_timestamp(),
  heartbeat_at  timestamptz not null default clock_timestamp(),
  expires_at    timestamptz not null,
  state         text not null default '{}'      -- what "postrider status" shows: open breakers, last error
) with (fillfactor = 50);

-- One row per shard; it changes at handover alone. The token, drawn at random at every acquisition, is the right
-- to read and to write.
create table outbox_shard (
  shard         smallint primary key,
  owner         bigint,
  token         bigint,
  acquired_at   timestamptz,
  unclean_ends  int not null default 0,         -- owners in a row that ended without releasing it
  suspect       bigint                          -- the message that was being worked on alone when they did
) with (fillfactor = 50);
insert into outbox_shard (shard) select generate_series(0, 63);

-- What operators did.
create table outbox_audit (
  id          bigint generated always as identity primary key,
  at          timestamptz not null default clock_timestamp(),
  actor       text not null,
  action      text not null,                    -- redrive | cancel
  message     bigint not null,                  -- outbox.id
  detail      text
);
create index outbox_audit_message on outbox_audit (message);

-- Puts each new message into the ready queue or among the waiting, in the producer's own transaction, whichever
-- client inserts it. SECURITY DEFINER: a producer needs no right on the small tables. The search_path is fixed
-- because pg_dump empties it on restore and because a definer's function must not follow the caller's. Calls and operators
-- fit exactly or are qualified: whoever may create in this schema could otherwise offer a better fit and run as the owner.
create function outbox_route() returns trigger language plpgsql security definer set search_path from current as $$
declare
  hash bigint := ('x' || substr(md5(coalesce(new.message_key, new.aggregate_type || ':' || new.aggregate_id,
                                             new.message_id)), 1, 16))::bit(64)::bigint;
  size int := coalesce(octet_length(new.payload), 0) + coalesce(octet_length(new.payload_bytes), 0);
begin
  if new.due_at > clock_timestamp() then
    insert into outbox_waiting (id, key_hash, due_at, bytes, shard)
    values (new.id, hash, new.due_at, size, (hash & 63::bigint)::smallint);
  else
    insert into outbox_queue (id, key_hash, bytes, shard) values (new.id, hash, size, (hash & 63::bigint)::smallint);
  end if;
  return null;
end $$;
create trigger outbox_route after insert on outbox for each row execute function outbox_route();

-- Tells a producer whether a message that plain SQL wrote (content_hash is null) has the content it is about to write,
-- without a right to read it. Null when there is no such message. Header names are compared without regard to case.
create function outbox_same_content(message_id text, topic text, key text, headers text, content_type text, payload bytea)
returns boolean language sql stable security definer set search_path from current as $$
  select o.topic = $2
     and coalesce(o.message_key, o.aggregate_type || ':' || o.aggregate_id) is not distinct from $3
     and (select pg_catalog.jsonb_object_agg(lower(h.key), h.value) from jsonb_each(o.headers::jsonb) h)
         is not distinct from (select pg_catalog.jsonb_object_agg(lower(h.key), h.value) from jsonb_each($4::jsonb) h)
     and o.content_type is not distinct from $5
     and coalesce(pg_catalog.convert_to(o.payload, 'UTF8'), o.payload_bytes) is not distinct from $6
  from outbox o where o.message_id = $1
$$;
revoke execute on function outbox_same_content(text, text, text, text, text, bytea) from public;

-- One row per message. Filter it by id or message_id; to list by state, start from the small table.
create view outbox_status as
select o.id, o.message_id, o.topic, o.message_key, o.aggregate_type, o.aggregate_id, o.event_type, o.created_at,
       case when d.id is not null then 'DEAD'
            when q.id is not null or w.id is not null then 'PENDING'
            when c.id is not null then 'CANCELLED'
            when s.sent_at is not null then 'SENT'
            else 'UNACCOUNTED' end as state,
       coalesce(w.attempts, d.attempts, 0) as attempts,
       coalesce(w.tries, d.tries) as tries,
       w.due_at,
       coalesce(w.last_error, d.last_error) as last_error,
       s.sent_at, s.sink, s.evidence,
       d.dead_at, d.reason as dead_reason,
       c.cancelled_at, c.cancelled_by, c.reason as cancel_reason
from outbox o
left join outbox_queue q on q.id = o.id
left join outbox_waiting w on w.id = o.id
left join outbox_dead d on d.id = o.id
left join outbox_cancelled c on c.id = o.id
left join lateral (
  select r.sent_at, r.sink, r.evidence[array_position(r.ids, o.id)] as evidence
  from outbox_sent r
  where r.bucket = o.id >> 12 and o.id = any(r.ids)
  order by r.sent_at desc limit 1) s on true;

-- The consumer's side: message ids already handled. In the database of the consumer's effects.
create table inbox (
  consumer      text collate "C" not null,
  message_id    text collate "C" not null,
  content_hash  bigint,                         -- of what was received; the same id with other content is an alarm
  position      bigint,                         -- the message's id in its outbox
  handled_at    timestamptz not null default clock_timestamp(),
  primary key (consumer, message_id)
);
create index inbox_handled_at on inbox (handled_at);

-- Messages a consumer gave up on, kept for a human.
create table inbox_dead (
  consumer    text collate "C" not null,
  message_id  text collate "C" not null,
  topic       text not null,
  body        bytea,
  headers     text,
  attempts    int not null,
  last_error  text not null,
  dead_at     timestamptz not null default clock_timestamp(),
  primary key (consumer, message_id)
);
