//! Cases about databases that a relay must refuse, with words that help.

use postrider_relay::source::SourceError;
use postrider_relay::sources;

use super::DatabaseUnderTest;

/// The text of a refusal that an operator must mend, from the relay's and the operators' side alike.
async fn refusal<D: DatabaseUnderTest>(db: &D) -> String {
    let relay = db.try_relay(1).await.map(drop);
    let admin = sources::admin(&db.url()).await.map(drop);
    match (relay, admin) {
        (Err(SourceError::Operator(text)), Err(SourceError::Operator(other))) => {
            assert_eq!(text, other);
            text
        }
        other => panic!("expected two refusals for an operator, got {other:?}"),
    }
}

/// `postrider init`, and for which database.
pub async fn a_missing_table_names_the_cure<D: DatabaseUnderTest>(db: &D) {
    db.execute("alter table outbox_waiting rename to something_else").await;
    let text = refusal(db).await;
    assert!(text.contains("outbox_waiting") && text.contains("postrider init"), "{text}");
    db.execute("drop view outbox_status").await;
    db.execute("alter table outbox rename to another_thing").await;
    let text = refusal(db).await;
    assert!(text.contains("no table outbox") && text.contains("postrider init"), "{text}");
}

/// A table of that name may be anybody's.
pub async fn tables_made_by_hand_are_not_taken_for_ours<D: DatabaseUnderTest>(db: &D) {
    db.execute("drop table postrider_schema").await;
    let text = refusal(db).await;
    assert!(text.contains("postrider_schema") && text.contains("not made by"), "{text}");
}

/// Both directions, each with its own way out.
pub async fn an_older_and_a_newer_schema_are_refused<D: DatabaseUnderTest>(db: &D) {
    db.execute("delete from postrider_schema").await;
    let text = refusal(db).await;
    assert!(text.contains("version 0") && text.contains("postrider init"), "{text}");
    db.execute("insert into postrider_schema (version, name) values (1, 'outbox'), (2, 'future')").await;
    let text = refusal(db).await;
    assert!(text.contains("version 2") && text.contains("install a newer postrider"), "{text}");
}
